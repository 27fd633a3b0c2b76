// The extension module pace._C. Only files in csrc/python include pybind11. Pointers arrive as integers from
// data_ptr(); pace/ops has checked shapes and dtypes. The GIL is released around all long calls.
#include "bindings.h"

#include "pace/cpu.h"
#include "pace/dispatch.h"
#include "pace/threading.h"
#include "pace/xxh64.h"

namespace {

// The hash of the bytes of a contiguous buffer. Raises BufferError for another one.
uint64_t xxh64(const py::object& data) {
    Py_buffer view;
    if (PyObject_GetBuffer(data.ptr(), &view, PyBUF_SIMPLE)) throw py::error_already_set();
    uint64_t hash = 0;
    {
        const py::gil_scoped_release release;
        hash = pace::xxh64(view.buf, size_t(view.len));
    }
    PyBuffer_Release(&view);
    return hash;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
    m.doc() = "C++ kernels of pace; use them through pace.ops";

    m.def("isa", [] { return pace::kernels().name; });
    m.def("select_isa", &pace::select_isa);
    m.def("available_isas", &pace::available_isas);
    m.def("built_isas", &pace::built_isas);
    m.def("best_isa", &pace::best_isa);
    m.def(
        "set_num_threads", [](int count, bool pinned) { pace::ThreadPool::instance().set_num_threads(count, pinned); },
        py::arg("count"), py::arg("pinned") = false);
    m.def("get_num_threads", [] { return pace::ThreadPool::instance().num_threads(); });
    m.def("pinned_cpus", [] { return pace::ThreadPool::instance().pinned_cpus(); });
    m.def("cpus_to_pin", [](int count) { return pace::cpus_to_pin("", pace::affinity_cpus(), count); });
    m.def("cpu_info", [] {
        const pace::CpuInfo& info = pace::cpu_info();
        py::dict out;
        out["model_name"] = info.model_name;
        out["features"] = info.features.names();
        out["logical_cpus"] = info.logical_cpus;
        out["physical_cores"] = info.physical_cores;
        out["numa_nodes"] = info.numa_nodes;
        out["quota_cpus"] = info.quota_cpus;
        out["quota_source"] = info.quota_source;
        out["default_threads"] = info.default_threads;
        out["threads_reason"] = info.threads_reason;
        return out;
    });

    m.def("xxh64", xxh64, py::arg("data"));

    bind_linear(m);
    bind_attention(m);
    bind_rows(m);
    bind_experts(m);
    bind_states(m);
    bind_program(m);
    bind_vocabulary(m);
}
