// Shared by the files of csrc/python, each of which binds one family of ops.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>

namespace py = pybind11;

void bind_linear(py::module_& m);
