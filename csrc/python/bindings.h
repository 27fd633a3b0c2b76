// Shared by the files of csrc/python. Each file binds one family of ops.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <string>

namespace py = pybind11;

// A pointer passed from Python: an integer from data_ptr(); 0 is null.
using Address = uintptr_t;

template <class T>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

void bind_linear(py::module_& m);
void bind_attention(py::module_& m);
void bind_rows(py::module_& m);
void bind_experts(py::module_& m);
void bind_states(py::module_& m);
void bind_program(py::module_& m);
void bind_vocabulary(py::module_& m);
