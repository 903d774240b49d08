#include "tensorrt/report.h"

#include <atomic>
#include <mutex>

namespace kvg::tensorrt {
namespace {

std::mutex g_mutex;  // guards g_last
std::string g_last;
std::atomic<trt::LoggerFinder*> g_finder{nullptr};  // owned by TensorRT

}  // namespace

void report(const char* sentence) noexcept {
  try {
    std::lock_guard<std::mutex> lock(g_mutex);
    g_last = sentence;
  } catch (const std::exception&) {  // no memory: the logger still gets it
  }
  trt::LoggerFinder* const finder = g_finder.load();
  trt::Logger* const logger = finder ? finder->find() : nullptr;
  if (logger) logger->log(trt::Severity::kError, sentence);
}

std::string last_sentence() {
  std::lock_guard<std::mutex> lock(g_mutex);
  return g_last;
}

void use_logger_finder(trt::LoggerFinder* finder) { g_finder.store(finder); }

}  // namespace kvg::tensorrt
