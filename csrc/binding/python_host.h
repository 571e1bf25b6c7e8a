// Python as the host of the library.
#pragma once

#include <pybind11/pybind11.h>

namespace ringattn {

// error_type: of Python, called with the text of a RingError and the keywords rank, peer, group, call and hop, each
// None if unknown.
void host_in_python(pybind11::object error_type);

}  // namespace ringattn
