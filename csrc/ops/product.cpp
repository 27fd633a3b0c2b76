// Prepares inputs for a packed weight, and calls the kernels that multiply its parts.
#include "pace/product.h"

#include <cstring>
#include <stdexcept>
#include <string>

#include "pace/ops.h"

namespace pace {

void Product::describe(const void* weight, bool has_order) {
    if (weight == described_ && has_order == has_order_ && table == &kernels()) return;
    described_ = nullptr;
    const PackedHeader& h = packed_header(weight);
    table = &kernels();
    k = h.k;
    glu = h.glu;
    n_out = glu ? h.n / 2 : h.n;
    panels = h.panels;
    input_bytes = 0;
    parts_.clear();
    kinds_.clear();
    for (int i = 0; i < h.parts(); ++i) add_part(weight, h.part(i), has_order);
    takes_floats = kinds_.size() == 1 && !kinds_[0].rounds && !kinds_[0].quantizes;
    described_ = weight;
    has_order_ = has_order;
}

bool Product::InputKind::serves(const PackedHeader& other) const {
    if (quantizes && header->in_super_blocks()) return other.in_super_blocks() && header->k_padded == other.k_padded;
    if (quantizes)
        return header->layout == other.layout && header->offset == other.offset && header->k_padded == other.k_padded &&
               header->input_group() == other.input_group() && header->token_inputs == other.token_inputs &&
               header->multiplies_distances() == other.multiplies_distances() &&
               (!header->multiplies_distances() || header->min_level() == other.min_level());
    return header->dtype == other.dtype && header->k_padded == other.k_padded &&
           (!other.quantized() || other.layout == Layout::PanelF8);
}

void Product::add_part(const void* weight, const PackedHeader& part, bool has_order) {
    if (!part.quantized() && part.layout != preferred_layout({.dtype = part.dtype}))
        throw std::invalid_argument(std::string("this weight was packed for another instruction set than ") +
                                    table->name +
                                    ", the one in use; pack it again, or select the instruction set before loading");
    if (has_order && !part.quantized()) throw std::invalid_argument("only quantised weights have an order of columns");
    const auto found =
        std::find_if(kinds_.begin(), kinds_.end(), [&](const InputKind& kind) { return kind.serves(part); });
    const int input = int(found - kinds_.begin());
    if (found == kinds_.end()) {
        const bool rounds = table->rounds_inputs && part.dtype == DType::BF16;
        const bool quantizes = part.quantized() && part.layout != Layout::PanelF8;
        kinds_.push_back({&part, rounds, quantizes, input_bytes});
        input_bytes +=
            quantizes ? QuantizedInput::bytes(part) : part.k_padded * int64_t(rounds ? sizeof(BF16) : sizeof(float));
    }
    const bool first = parts_.empty();
    parts_.push_back({reinterpret_cast<const char*>(&part) - static_cast<const char*>(weight), part.n, part.panels,
                      first ? 0 : parts_.back().first_panel + parts_.back().panels,
                      first ? 0 : parts_.back().first_row + parts_.back().rows, input});
}

const char* Product::panel(const void* weight, int64_t panel) const {
    const auto header = [&](const Part& part) {
        return reinterpret_cast<const PackedHeader*>(static_cast<const char*>(weight) + part.offset);
    };
    if (glu && parts_.size() > 1) return header(parts_[0])->panel(panel / 2);
    const auto found = std::find_if(parts_.begin(), parts_.end() - 1,
                                    [&](const Part& part) { return panel < part.first_panel + part.panels; });
    return header(*found)->panel(panel - found->first_panel);
}

void Product::fetch_header(const void* weight) const {
    for (const Part& part : parts_) __builtin_prefetch(static_cast<const char*>(weight) + part.offset);
    __builtin_prefetch(kinds_.data());
}

void Product::prepare_row(const float* x, const Norm& norm, const int32_t* order, char* out) const {
    float* const scratch = static_cast<float*>(thread_scratch(size_t(2 * k) * sizeof(float)));
    if (norm) {
        const auto normalise = norm.kind == Norm::Kind::Layer ? table->layer_norm : table->rms_norm;
        normalise({x, norm.weight, norm.bias, scratch}, k, norm.eps);
        x = scratch;
    }
    if (order) {
        for (int64_t j = 0; j < k; ++j) scratch[k + j] = x[order[j]];
        x = scratch + k;
    }
    for (const InputKind& kind : kinds_) {
        char* const place = out + kind.offset;
        if (kind.quantizes) {
            table->quantize_input(x, *kind.header, place);
        } else if (kind.rounds) {
            table->round_to_bf16(x, reinterpret_cast<BF16*>(place), k, kind.header->k_padded);
        } else {
            std::memcpy(place, x, size_t(k) * sizeof(float));
        }
    }
}

// Computes sums for a part's panels [first_panel, first_panel + panel_count).
void Product::multiply(const Part& part, const void* weight, const Inputs& x, int64_t first_panel, int64_t panel_count,
                       float* sums, int64_t sums_stride) const {
    const PackedHeader& h = *reinterpret_cast<const PackedHeader*>(static_cast<const char*>(weight) + part.offset);
    const InputKind& kind = kinds_[size_t(part.input)];
    const void* const rows = static_cast<const char*>(x.rows) + kind.offset;
    if (h.quantized())
        return table->linear_quantized({rows, x.stride, x.count, &h, first_panel, panel_count, sums, sums_stride});
    LinearArgs a = {};
    a.x = rows;
    a.x_stride = x.stride / int64_t(kind.rounds ? sizeof(BF16) : sizeof(float));
    a.rows = x.count;
    a.panels = h.panel(first_panel);
    a.panel_count = panel_count;
    a.k_padded = h.k_padded;
    a.sums = sums;
    a.sums_stride = sums_stride;
    table->linear[size_t(h.dtype)](a);
}

}  // namespace pace
