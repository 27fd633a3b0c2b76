// Operations on the hundreds of thousands of texts in a vocabulary, for which a Python loop is too slow.
#include <cstring>
#include <string_view>

#include "bindings.h"
#include "pace/vocabulary.h"

namespace {

// `count` strings of a GGUF file from byte `position` of `data` on, each a length of 8 bytes and UTF-8. Also returns
// the byte at which they end. Raises EOFError if they extend beyond byte `end`, and UnicodeDecodeError.
std::pair<py::list, int64_t> read_strings(const py::buffer& data, int64_t position, int64_t end, int64_t count) {
    const py::buffer_info memory = data.request();
    if (position < 0 || end > memory.size * memory.itemsize) throw py::value_error("no such bytes");
    const char* const bytes = static_cast<const char*>(memory.ptr);
    py::list strings(0);
    for (int64_t i = 0; i < count; ++i) {
        uint64_t length = 0;
        if (end - position >= 8) std::memcpy(&length, bytes + position, 8);
        if (end - position < 8 || length > uint64_t(end - position - 8)) {
            PyErr_SetNone(PyExc_EOFError);
            throw py::error_already_set();
        }
        PyObject* const text = PyUnicode_DecodeUTF8(bytes + position + 8, Py_ssize_t(length), nullptr);
        if (!text) throw py::error_already_set();
        strings.append(py::reinterpret_steal<py::str>(text));
        position += 8 + int64_t(length);
    }
    return {std::move(strings), position};
}

// Pairs of texts, from pairs of piece indices.
py::list find_merges(const py::list& pieces, const py::buffer& order) {
    std::vector<std::string_view> texts;
    texts.reserve(pieces.size());
    for (const py::handle piece : pieces) {
        Py_ssize_t length = 0;
        const char* const text = piece.is_none() ? "" : PyUnicode_AsUTF8AndSize(piece.ptr(), &length);
        if (!text) throw py::error_already_set();
        texts.emplace_back(text, size_t(length));
    }
    const py::buffer_info indices = order.request();
    if (indices.itemsize != 4 || indices.ndim != 1) throw py::value_error("order is a vector of uint32");
    const auto* const first = static_cast<const uint32_t*>(indices.ptr);
    const std::vector<uint32_t> wanted(first, first + indices.size);
    for (const uint32_t index : wanted)
        if (index >= texts.size()) throw py::value_error("order has an index beyond the pieces");
    std::vector<pace::Merge> merges;
    {
        const py::gil_scoped_release release;
        merges = pace::find_merges(texts, wanted);
    }
    py::list pairs(merges.size());
    for (size_t i = 0; i < merges.size(); ++i)
        pairs[i] = py::make_tuple(pieces[merges[i].left], pieces[merges[i].right]);
    return pairs;
}

}  // namespace

void bind_vocabulary(py::module_& m) {
    m.def("read_strings", read_strings, py::arg("data"), py::arg("position"), py::arg("end"), py::arg("count"));
    m.def("find_merges", find_merges, py::arg("pieces"), py::arg("order"));
}
