// The text of a refusal, as a kernel's parameter.
#pragma once
#include "epcy/cuda.h"

struct Text {
  char bytes[EPCY_CUDA_TEXT_BYTES];
};

inline Text text_of(const char *text) { // NULL: none
  Text t = {};
  for (int i = 0; text && text[i] && i < EPCY_CUDA_TEXT_BYTES - 1; i++) t.bytes[i] = text[i];
  return t;
}
