// Products access nothing past the end of their inputs, weights and sums: each of these ends at a page that faults. A
// tile configured for too many rows would read and write there. In ordinary memory, no result would show it.
#include <algorithm>
#include <csetjmp>
#include <csignal>
#include <sys/mman.h>
#include <unistd.h>

#include "check.h"
#include "pace/ops.h"

namespace {

using namespace pace;

// Zeroed bytes, followed by a page that faults.
class Guarded {
  public:
    explicit Guarded(int64_t bytes) : page(sysconf(_SC_PAGESIZE)), mapped(round_up(bytes, page) + page) {
        begin = static_cast<char*>(
            mmap(nullptr, size_t(mapped), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        if (begin == MAP_FAILED) throw std::runtime_error("mmap");
        if (mprotect(begin + mapped - page, size_t(page), PROT_NONE) != 0) throw std::runtime_error("mprotect");
        data = begin + mapped - page - bytes;
    }
    Guarded(const Guarded&) = delete;
    ~Guarded() { munmap(begin, size_t(mapped)); }
    template <class T>
    T* as() const {
        return reinterpret_cast<T*>(data);
    }

  private:
    int64_t page, mapped;
    char *begin, *data;
};

sigjmp_buf before_fault;
void leave(int) { siglongjmp(before_fault, 1); }

// True if `work` ends without a fault.
template <class Work>
bool stays_inside(const Work& work) {
    struct sigaction action = {}, usual;
    action.sa_handler = leave;
    sigaction(SIGSEGV, &action, &usual);
    volatile bool inside = false;
    if (sigsetjmp(before_fault, 1) == 0) {
        work();
        inside = true;
    }
    sigaction(SIGSEGV, &usual, nullptr);
    return inside;
}

// Multiplies `rows` inputs of ones by a weight of zeros, from floats to sums, calling the kernels like LinearOp. Inputs
// are rounded or quantised if the table needs that.
void multiply(const KernelTable& table, const PackedHeader& h, int64_t rows, const std::string& what) {
    const bool rounds = table.rounds_inputs && h.dtype == DType::BF16,
               quantizes = h.quantized() && h.layout != Layout::PanelF8;
    const Guarded floats(rows * h.k * int64_t(sizeof(float)));
    std::fill_n(floats.as<float>(), rows * h.k, 1.0f);
    const int64_t row_bytes = quantizes ? QuantizedInput::bytes(h)
                              : rounds  ? h.k_padded * int64_t(sizeof(BF16))
                                        : h.k * int64_t(sizeof(float));
    const Guarded converted(rows * row_bytes), sums(rows * h.panels * kPanelRows * int64_t(sizeof(float)));
    const Guarded& x = rounds || quantizes ? converted : floats;
    const int64_t count = rows * h.panels * kPanelRows;
    std::fill_n(sums.as<float>(), count, check::kPoison);
    const bool inside = stays_inside([&] {
        for (int64_t r = 0; r < rows; ++r) {
            const float* const row = floats.as<float>() + r * h.k;
            if (rounds)
                table.round_to_bf16(row, reinterpret_cast<BF16*>(x.as<char>() + r * row_bytes), h.k, h.k_padded);
            if (quantizes) table.quantize_input(row, h, x.as<char>() + r * row_bytes);
        }
        const int64_t sums_stride = h.panels * kPanelRows;
        if (h.quantized())
            table.linear_quantized({x.as<void>(), row_bytes, rows, &h, 0, h.panels, sums.as<float>(), sums_stride});
        else
            table.linear[size_t(h.dtype)]({x.as<void>(), row_bytes / int64_t(rounds ? sizeof(BF16) : sizeof(float)),
                                           rows, h.panel(0), h.panels, h.k_padded, sums.as<float>(), sums_stride});
    });
    bool done = inside;
    for (int64_t i = 0; done && i < count; ++i) done = sums.as<float>()[i] == 0.0f;
    if (!done)
        check::fail(__FILE__, __LINE__,
                    (inside ? "wrong: " : "out of bounds: ") + what + " m " + std::to_string(rows) + " k " +
                        std::to_string(h.k));
}

}  // namespace

static PackedFormat super_blocks(Code code, int group, GroupScales scales, bool has_mins) {
    return {.code = code, .group = group, .has_mins = has_mins, .group_scales = scales};
}

TEST_TABLES(products_touch_nothing_behind_their_arguments) {
    struct Kind {
        const char* name;
        PackedFormat format;
    };
    const Kind kinds[] = {{"float32", {.dtype = DType::F32}},
                          {"float16", {.dtype = DType::F16}},
                          {"bfloat16", {.dtype = DType::BF16}},
                          {"int8", {.code = Code::I8}},
                          {"int8 by 32", {.code = Code::I8, .group = 32}},
                          {"uint4", {.code = Code::U4}},
                          {"uint4 by 16 with minima", {.code = Code::U4, .group = 16, .has_mins = true}},
                          {"uint4 by 64", {.code = Code::U4, .group = 64}},
                          {"float8 by 32", {.code = Code::F8, .group = 32}},
                          {"uint5 by 32", {.code = Code::U5, .group = 32}},
                          {"uint1 by 128", {.code = Code::U1, .group = 128}},
                          {"uint2 by 64", {.code = Code::U2, .group = 64}},
                          {"uint2 of tokens", {.code = Code::U2, .offset = 1, .token_inputs = true}},
                          {"Q2_K", super_blocks(Code::U2, 16, GroupScales::NibblePairs, true)},
                          {"Q3_K", super_blocks(Code::U3, 16, GroupScales::SixBits, false)},
                          {"Q4_K", super_blocks(Code::U4, 32, GroupScales::SixBits, true)},
                          {"Q5_K", super_blocks(Code::U5, 32, GroupScales::SixBits, true)},
                          {"Q6_K", super_blocks(Code::U6, 16, GroupScales::Bytes, false)},
                          {"IQ4_XS", super_blocks(Code::U4, 32, GroupScales::SixBits, false)},
                          {"IQ1_M", {.code = Code::IQ1M, .group = 16}},
                          {"IQ2_XXS", {.code = Code::IQ2XXS, .group = 32}},
                          {"IQ2_S", {.code = Code::IQ2S, .group = 16}},
                          {"IQ3_S", {.code = Code::IQ3S, .group = 32}}};
    for (const Kind& kind : kinds)
        for (int64_t k : {1, 2, 16, 33, 64, 100, 130, 545}) {
            if (kind.format.group_scales != GroupScales::None || is_grid(kind.format.code)) {
                if (k > 2) break;
                k *= kSuperBlock;
            }
            for (const int64_t n : {16, 40}) {
                const Guarded weight(round_up(packed_bytes(n, k, kind.format, false), 64));
                init_packed(weight.as<void>(), n, k, kind.format, false);
                for (const int64_t rows : {1, 5, 7, 15, 16, 17, 31, 32, 33})
                    multiply(table, packed_header(weight.as<void>()), rows, kind.name);
            }
        }
}
