// The tests of csrc/core: a plain program. Argument: a seed, to repeat a failure.
#include <cstdlib>

#include "check.h"

int main(int argc, char** argv) {
  using namespace ringattn::test;
  const std::uint64_t seed = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : std::random_device{}();
  std::cout << "seed " << seed << std::endl;

  struct Test {
    const char* name;
    void (*run)(Random&);
  };
  for (const Test& test : {Test{"layouts", test_layouts}, Test{"masks", test_masks}, Test{"schedules", test_schedules},
                           Test{"headers", test_headers}}) {
    current_test = text(test.name, ", seed ", seed);
    Random random(seed);
    test.run(random);
  }

  if (failures > 0) {
    std::cout << failures << " checks failed" << std::endl;
  } else {
    std::cout << "all checks passed" << std::endl;
  }
  return failures > 0 ? 1 : 0;
}
