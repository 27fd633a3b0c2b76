// Attention and the key/value cache.
#include "bindings.h"
#include "pace/attention_ops.h"
#include "pace/ops.h"
#include "pace/row_ops.h"

namespace {

pace::KvView kv_view(Address k, Address v, int64_t k_block_stride, int64_t v_block_stride, int dtype,
                     int64_t num_blocks, int64_t kv_heads, int64_t key_dim, int64_t value_dim) {
    return {at<void>(k), at<void>(v), k_block_stride, v_block_stride, pace::DType(dtype),
            num_blocks,  kv_heads,    key_dim,        value_dim};
}

// latent_q = 0, window = 0, softcap = 0 and sinks = 0 are off.
void attention(const pace::KvView& kv, Address q, int64_t q_token_stride, int64_t q_head_stride, Address latent_q,
               int64_t latent_token_stride, int64_t latent_head_stride, int64_t tokens, int64_t query_heads,
               float scale, int64_t window, bool chunked, float softcap, Address sinks, Address query_start,
               Address kv_len, Address block_table, int64_t spans, int64_t table_stride, Address out) {
    pace::AttentionOp op = {};
    op.q = at<const float>(q);
    op.args = {q_token_stride,
               q_head_stride,
               kv,
               query_heads,
               scale,
               window == 0 ? pace::kNoWindow : window,
               softcap,
               at<float>(out),
               at<const float>(sinks),
               at<const float>(latent_q),
               latent_token_stride,
               latent_head_stride,
               chunked};
    op.tokens = tokens;
    op.spans = spans;
    op.query_start = at<const int32_t>(query_start);
    op.kv_len = at<const int32_t>(kv_len);
    op.block_table = at<const int32_t>(block_table);
    op.table_stride = table_stride;
    pace::execute(op);
}

void store_kv(const pace::KvView& kv, Address k, int64_t k_token_stride, int64_t k_head_stride, Address v,
              int64_t v_token_stride, int64_t v_head_stride, Address slots, int64_t tokens) {
    pace::StoreKvOp op = {kv,
                          {at<float>(k), k_token_stride, k_head_stride},
                          {at<float>(v), v_token_stride, v_head_stride},
                          at<const int64_t>(slots),
                          tokens};
    pace::execute(op);
}

void rotary(Address x, int64_t tokens, int64_t heads, int64_t token_stride, int64_t head_stride, Address cos,
            Address sin, int64_t half, bool interleaved) {
    pace::RotaryOp op = {};
    op.x = {at<float>(x), token_stride, head_stride};
    op.tokens = tokens;
    op.heads = heads;
    op.cos = at<const float>(cos);
    op.sin = at<const float>(sin);
    op.half = half;
    op.interleaved = interleaved;
    pace::execute(op);
}

}  // namespace

void bind_attention(py::module_& m) {
    const py::call_guard<py::gil_scoped_release> release;
    py::class_<pace::KvView>(m, "KvView").def(py::init(&kv_view));
    m.attr("BLOCK_POSITIONS") = pace::kBlockPositions;
    m.def("attention", attention, release);
    m.def("store_kv", store_kv, release);
    m.def("rotary", rotary, release);
}
