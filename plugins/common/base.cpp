#include "common/base.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <new>

namespace kvg {
namespace {

[[noreturn]] void refuse_with(kvg_status status, const char* format, va_list arguments) {
  char sentence[512];
  std::vsnprintf(sentence, sizeof sentence, format, arguments);
  throw Refusal(status, sentence);
}

}  // namespace

void refuse(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  refuse_with(KVG_REFUSED, format, arguments);
}

void refuse(kvg_status status, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  refuse_with(status, format, arguments);
}

void check_alias(const kvg_op& op, int index, const kvg_tensor* operands) {
  const kvg_operand& output = op.operands[index];
  const kvg_tensor &input = operands[output.alias], &given = operands[index];
  const bool empty = std::count(input.shape, input.shape + input.rank, 0);
  if (given.data == input.data || empty) return;
  refuse(
      "%s: %s: expected the address of %s %p, got %p: bind one buffer to both, a copy of the "
      "pool is never made",
      op.name, output.name, op.operands[output.alias].name, input.data, given.data);
}

Failure failure_of(const std::exception& error) {
  if (const auto* refusal = dynamic_cast<const Refusal*>(&error))
    return {refusal->status, refusal->what()};
  if (dynamic_cast<const std::bad_alloc*>(&error))
    return {KVG_DEVICE, "memory: expected enough for this call, got no more from the system"};
  return {KVG_REFUSED, error.what()};
}

void say(const char* sentence, char* message, size_t message_size) {
  if (message && message_size) std::snprintf(message, message_size, "%s", sentence);
}

}  // namespace kvg
