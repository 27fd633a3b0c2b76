// Attention and the key/value cache.
#include "records.h"

namespace {

using pace::Array;
using pace::HeadsTensor;
using pace::Matrix;

pace::KvView kv_view(Address k, Address v, int64_t k_block_stride, int64_t v_block_stride, int dtype,
                     int64_t num_blocks, int64_t kv_heads, int64_t key_dim, int64_t value_dim) {
    return {at<void>(k), at<void>(v), k_block_stride, v_block_stride, pace::DType(dtype),
            num_blocks,  kv_heads,    key_dim,        value_dim};
}

void attention(const pace::KvView& kv, const HeadsTensor& q, const std::optional<HeadsTensor>& latent_q,
               const pace::Spans& spans, const pace::AttentionOptions& options, Array<float> out) {
    const pace::HeadsView latents = latent_q.value_or(HeadsTensor{});
    pace::AttentionOp op = {};
    op.q = q.data;
    op.args = {options,      q.token_stride,       q.head_stride,      kv, q.heads, out,
               latents.data, latents.token_stride, latents.head_stride};
    op.tokens = q.tokens;
    op.spans = spans;
    pace::execute(op);
}

void store_kv(const pace::KvView& kv, const HeadsTensor& k, const HeadsTensor& v, Array<const int64_t> slots) {
    pace::StoreKvOp op = {kv, k, v, slots, k.tokens};
    pace::execute(op);
}

void rotary(const HeadsTensor& x, const Matrix& cos, Array<const float> sin, bool interleaved) {
    pace::RotaryOp op = {};
    op.x = x;
    op.tokens = x.tokens;
    op.heads = x.heads;
    op.cos = cos.data;
    op.sin = sin;
    op.half = cos.columns;
    op.interleaved = interleaved;
    pace::execute(op);
}

}  // namespace

void bind_attention(py::module_& m) {
    const py::call_guard<py::gil_scoped_release> release;
    py::class_<pace::KvView>(m, "KvView").def(py::init(&kv_view));
    m.attr("BLOCK_POSITIONS") = pace::kBlockPositions;
    m.attr("MAX_HEAD_DIM") = pace::kMaxHeadDim;
    m.def("attention", attention, release);
    m.def("store_kv", store_kv, release);
    m.def("rotary", rotary, release);
}
