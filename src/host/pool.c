#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "pool.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

struct epcy_pool {
  pthread_mutex_t lock;
  pthread_cond_t work, idle;
  pthread_t *threads;
  pid_t process;                   /* whose threads they are: a fork has none of them */
  int num_threads, num_busy, stop; /* guarded by lock */
  int num_started;                 /* guarded by lock: each thread takes its number */
  int limit;                       /* guarded by lock: threads that work beside the caller */
  uint64_t round;                  /* guarded by lock: a new value is new work */
  epcy_task task;
  const void *context;
  int64_t count, grain;
  _Atomic int64_t next;
};

static void take_pieces(epcy_pool *p) {
  for (;;) {
    const int64_t begin = atomic_fetch_add_explicit(&p->next, p->grain, memory_order_relaxed);
    if (begin >= p->count) return;
    p->task(p->context, begin, begin + p->grain < p->count ? begin + p->grain : p->count);
  }
}

static void *worker(void *argument) {
  epcy_pool *p = argument;
  uint64_t seen = 0;
  pthread_mutex_lock(&p->lock);
  const int number = p->num_started++;
  for (;;) {
    while (p->round == seen && !p->stop) pthread_cond_wait(&p->work, &p->lock);
    if (p->stop) break;
    seen = p->round;
    if (number >= p->limit) continue;
    pthread_mutex_unlock(&p->lock);
    take_pieces(p);
    pthread_mutex_lock(&p->lock);
    if (--p->num_busy == 0) pthread_cond_signal(&p->idle);
  }
  pthread_mutex_unlock(&p->lock);
  return NULL;
}

void epcy_pool_close(epcy_pool *p) {
  if (!p || p->process != getpid()) return;
  pthread_mutex_lock(&p->lock);
  p->stop = 1;
  pthread_cond_broadcast(&p->work);
  pthread_mutex_unlock(&p->lock);
  for (int i = 0; i < p->num_threads; i++) pthread_join(p->threads[i], NULL);
  pthread_cond_destroy(&p->work);
  pthread_cond_destroy(&p->idle);
  pthread_mutex_destroy(&p->lock);
  free(p->threads);
  free(p);
}

int epcy_pool_open(epcy_pool **pool, int num_threads) {
  epcy_pool *p = calloc(1, sizeof *p);
  if (!p) return ENOMEM;
  p->threads = calloc((size_t)num_threads, sizeof *p->threads);
  if (!p->threads) {
    free(p);
    return ENOMEM;
  }
  p->process = getpid();
  pthread_mutex_init(&p->lock, NULL);
  pthread_cond_init(&p->work, NULL);
  pthread_cond_init(&p->idle, NULL);
  sigset_t all, before; /* signals are for the interpreter's threads */
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  int error = 0;
  for (int i = 0; i < num_threads - 1 && !error; i++) {
    error = pthread_create(&p->threads[i], NULL, worker, p);
    if (!error) p->num_threads++;
  }
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  p->limit = p->num_threads;
  if (error) epcy_pool_close(p);
  else *pool = p;
  return error;
}

void epcy_pool_run(epcy_pool *p, epcy_task task, const void *context, int64_t count, int64_t grain) {
  if (!p || p->limit == 0 || count < 2 * grain) {
    if (count > 0) task(context, 0, count);
    return;
  }
  pthread_mutex_lock(&p->lock);
  p->task = task;
  p->context = context;
  p->count = count;
  p->grain = grain;
  atomic_store_explicit(&p->next, 0, memory_order_relaxed);
  p->num_busy = p->limit;
  p->round++;
  pthread_cond_broadcast(&p->work);
  pthread_mutex_unlock(&p->lock);
  take_pieces(p);
  pthread_mutex_lock(&p->lock);
  while (p->num_busy) pthread_cond_wait(&p->idle, &p->lock);
  pthread_mutex_unlock(&p->lock);
}

void epcy_pool_limit(epcy_pool *p, int num_threads) {
  pthread_mutex_lock(&p->lock);
  p->limit = num_threads - 1 < p->num_threads ? num_threads - 1 : p->num_threads;
  pthread_mutex_unlock(&p->lock);
}
