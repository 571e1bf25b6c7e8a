#include "cuda/registry.h"

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

const void* find_kernel(std::string_view name) {
  for (const Registered* entry = first(); entry != nullptr; entry = entry->next) {
    if (entry->name == name) return entry->function;
  }
  return nullptr;
}

}  // namespace ringattn::cuda
