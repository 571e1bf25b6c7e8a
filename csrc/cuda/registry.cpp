#include "cuda/registry.h"

#include <cstring>

namespace ringattn::cuda {
namespace {

const Registered*& first() {
  static const Registered* entry = nullptr;
  return entry;
}

}  // namespace

Registered::Registered(const char* name, const void* function) : name(name), function(function), next(first()) {
  first() = this;
}

const void* find_kernel(const char* name) {
  for (const Registered* entry = first(); entry != nullptr; entry = entry->next) {
    if (std::strcmp(entry->name, name) == 0) return entry->function;
  }
  return nullptr;
}

}  // namespace ringattn::cuda
