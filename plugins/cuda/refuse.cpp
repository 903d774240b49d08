#include "cuda/refuse.h"

#include <cstdarg>
#include <cstdio>

namespace kvg::cuda {

void refuse(kvg_status status, const char* format, ...) {
  char sentence[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(sentence, sizeof sentence, format, arguments);
  va_end(arguments);
  throw Refusal(status, sentence);
}

void say(const char* sentence, char* message, size_t message_size) {
  if (message && message_size) std::snprintf(message, message_size, "%s", sentence);
}

}  // namespace kvg::cuda
