/* The end of a process whose peers are dead. */
#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L
#endif
#include <signal.h>
#include <string.h>
#include <unistd.h>

#include "epcy/host.h"

static void end_now(int signal_number) {
  (void)signal_number;
  _exit(1);
}

/* MPI_Finalize may wait for a dead rank for ever: allow it some seconds. Called when the interpreter has ended and before
 * mpi4py finalizes MPI. */
void epcy_host_bound_exit(void) {
  struct sigaction action;
  memset(&action, 0, sizeof action);
  action.sa_handler = end_now;
  sigaction(SIGALRM, &action, NULL);
  alarm(5);
}
