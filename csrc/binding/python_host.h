// Python as the host of the library.
#pragma once

#include <pybind11/pybind11.h>

namespace ringattn {

// error_type: of Python, called with the text of a RingError and the keywords rank, peer, group, call and hop, each
// None if unknown. is_inherited: called with the name of a group, says what Host::is_inherited does.
void host_in_python(pybind11::object error_type, pybind11::object is_inherited);

// The thread on which Python's handlers of signals run: its main one, and in a forked child that which forked.
void main_thread_is(unsigned long identifier);

}  // namespace ringattn
