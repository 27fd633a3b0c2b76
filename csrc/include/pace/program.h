// A model's forward pass as a list of instructions, recorded once and run in one call per step.
//
//   record   linear(...), attention(...), ... append instructions over *values*: rows of fp32 in numbered buffers.
//   run      binds each instruction to this step's memory and cuts it into phases. The thread pool then runs all phases
//            of all instructions in one parallel region, with a barrier between phases. Nothing is allocated while
//            shapes repeat.
//
// The instructions are the ops of pace/ops.h, so a program gives bit for bit the results of the single ops. The
// recorder (pace/graph) assigns values to buffers; a program does not check this plan.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "pace/adapter_ops.h"
#include "pace/attention_ops.h"
#include "pace/expert_ops.h"
#include "pace/ops.h"
#include "pace/row_ops.h"
#include "pace/state_ops.h"
#include "pace/threading.h"

namespace pace {

// Cosines and sines for a step, [T][half] each.
struct Angles {
    const float *cos, *sin;
};

// The cache of one layer, and the index of its group in Step::tables.
struct LayerCache {
    KvView kv;
    int group;
    StateSlots states = {};  // for a layer with a state, which has no KvView
};

// A step's positions in the cache, for one group of layers.
struct Table {
    const int64_t* slots;  // [T]
    Spans spans;
};

// Rows of floats that stand for some rows of a step.
struct GivenRows {
    const float* data;  // [count][columns], stride floats between rows
    int64_t stride, count, columns;
    const int64_t* at;  // [count], ascending: the rows of the step
};

// Rows that a step writes next to its logits, one for each token.
struct KeptRows {
    float* data;  // [rows][columns], stride floats between rows
    int64_t stride, rows, columns;
};

// The adapters of the rows of a step (pace/adapter_ops.h).
struct AdapterRouting {
    const float* data;  // [rows][2 per_row]
    int64_t rows, per_row;
};

// The inputs of one step; the arrays are those of ForwardBatch in pace/batch.py.
struct Step {
    const LayerCache* cache;   // for every layer
    int64_t tokens;            // T
    int64_t logit_rows;        // R
    const int64_t* ids;        // [T]
    const int64_t* positions;  // [T]
    const Angles* angles;      // for every rotation table of the program
    const int64_t* rows;       // [R], ascending
    const Table* tables;       // for every group of layers
    float* logits;             // [R][vocabulary], written
    // [R] or null, written: the index of each row's largest result, as argmax() finds it; kNotFound (largest.h) for many
    // rows. Only if the result's last instruction is a product.
    int64_t* largest = nullptr;
    GivenRows given = {};
    KeptRows kept = {};
    AdapterRouting routing = {};
    const StateSpans* states = nullptr;    // null for a model without states
    const float* const* inputs = nullptr;  // for every input of the program: a row for each token
    const int64_t* types = nullptr;        // [T]; null for a model without token types
};

// [rows][columns] of fp32: one row for each token, or for each row of logits. Row r begins at r * columns of its
// buffer.
struct Value {
    static constexpr int kLogits = -1;  // the output buffer, Step::logits
    int buffer;
    int64_t columns;
    bool per_token;
};

// Columns [first, first + count) of a value, as an input.
struct Columns {
    Value value;
    int64_t first, count;
};

// Heads [rows][count][head_dim] within the rows of a value, from `column` on, `stride` columns apart.
struct HeadsOf {
    Value value;
    int64_t column, count, head_dim, stride;
};

// Rotary embedding with one of the step's angle tables: `half` pairs in each head; 0 = no rotation.
struct Rotation {
    int table;
    int64_t half;
    bool interleaved;
};

// Work that attention does before it reads the cache: it prepares queries and keys, and stores keys and values. Without
// keys and values, it prepares queries.
struct Preparation {
    std::optional<HeadsOf> k, v;
    Norm query_norm, key_norm, value_norm;  // each may be None
    Rotation rotation;
    bool norm_last;  // apply the norms of queries and keys after the rotation
};

// A recorded model. Every method that runs or inspects takes a turn of the thread pool. So several threads may use a
// program, and so may a child after fork().
class Program {
  public:
    // Buffer i has room for `widths[i]` floats for each token. The buffers lie in the same memory as those of
    // `neighbour`, if there is one. They hold nothing between two runs.
    explicit Program(std::vector<int64_t> widths, const Program* neighbour = nullptr)
        : widths_(std::move(widths)), memory_(neighbour ? neighbour->memory_ : std::make_shared<Buffers>()) {}

    enum class Ids { Tokens, Positions, Types };

    // -- recording; weights and parameters must outlive the program
    void embedding(Value out, const void* weight, const int32_t* order, Ids ids, int64_t offset);
    // Rows that the caller has read for each token: input `number` of the step.
    void input_rows(Value out, int number);
    // Columns from `first` on of the step's given rows: one for each token; or in place of rows of x, or added to them.
    void given_rows(Value out, int64_t first);
    void place_rows(Columns x, int64_t first, bool add);
    void gather_rows(Value out, Columns x);
    void keep_rows(Columns x, int64_t first);           // x becomes columns from `first` on of the step's kept rows
    void pool(Value out, Columns x, Pooling pooling);   // a row for each span, which has one logit row
    void concatenate(Value out, Columns a, Columns b);  // out = [a | b]
    void add(Value out, Columns a, Columns b);
    void activation(Value out, Columns x, const ActivationFunction& activation);
    void glu(Value out, Columns x, const ActivationFunction& activation);  // x is [gate | up]
    // Adds the products of the adapters that each row of the step is routed to. In place.
    void add_adapters(Columns y, Columns x, const Norm& norm, const AdapterTable& adapters);
    void scale(Columns x, float factor, const float* factors);  // in place; factors [x.count] or null
    void softcap(Columns x, float cap);                         // in place
    // norm(x), or with a residual, factor * (residual + norm(x)).
    void norm(Value out, Columns x, const Norm& norm, std::optional<Columns> residual, float factor);
    // With `adapters`, rows get what those that they are routed to add, before the activation of a gate.
    void linear(Value out, Columns x, const LinearOptions& options, std::optional<Value> residual,
                const std::optional<AdapterTable>& adapters = {});
    void gate(Columns x, Columns gate, Gate kind);  // in place
    void gated_norm(Value out, Columns x, Columns gate, const GatedNorm& norm);
    void causal_conv(Value out, Columns x, int layer, const Convolution& convolution);
    void recurrence(Value out, HeadsOf q, HeadsOf k, HeadsOf v, Columns steps, std::optional<Columns> beta, int layer,
                    const Recurrence& recurrence);
    void route(Value out, Columns logits, const Router& router);
    // `choices`: a routing; or, if `chooses`, the logits for the router.
    void experts(Value out, Columns x, Value choices, bool chooses, const Mixture& mixture,
                 std::optional<Value> residual);
    void norm_heads(HeadsOf heads, const Norm& norm);            // in place
    void rotate_heads(HeadsOf heads, const Rotation& rotation);  // in place
    void store_kv(HeadsOf k, HeadsOf v, int layer);
    void heads_linear(Value out, HeadsOf x, const ExpertStack& weights);
    void attention(Value out, HeadsOf q, std::optional<HeadsOf> latent_q, std::optional<Preparation> preparation,
                   int layer, const AttentionOptions& options);

    // Addresses of this step's values.
    struct Frame {
        const Program& program;
        const Step& step;
        float* at(Value value) const;
        float* at(Columns columns) const { return at(columns.value) + columns.first; }
        HeadsView at(HeadsOf heads) const {
            return {at(heads.value) + heads.column, heads.value.columns, heads.stride};
        }
        int64_t rows_of(Value value) const { return value.per_token ? step.tokens : step.logit_rows; }
    };

    // Records any op (pace/ops.h): bind(op, frame) points it at a step's memory, and prepare() follows. An op that
    // `varies` is bound for every step, others only when the number of rows, the threads or the table change. An op
    // that reads or writes the result varies, because the result has another address in every step.
    template <class Op, class Bind>
    void record(std::string name, bool varies, Bind bind) {
        instructions_.push_back(std::make_unique<Recorded<Op, Bind>>(std::move(name), varies, std::move(bind)));
        bound_ = {};
    }

    // -- running
    // Computes one step. Callers from several threads take turns. Throws std::invalid_argument, before anything is
    // computed, if an instruction refuses its inputs: an id outside the vocabulary, a slot outside the cache, ...
    void run(const Step& step);

    // -- inspecting
    struct Timing {
        std::string name;
        int64_t runs;
        double seconds;  // from the start of its first phase to the end of its last, over all runs
    };
    void set_profiling(bool on);  // forgets earlier timings
    std::vector<Timing> timings() const;
    int64_t num_instructions() const { return int64_t(instructions_.size()); }
    int64_t barriers() const { return int64_t(phases_.size()); }  // in the last run
    size_t buffer_bytes() const { return memory_->arena.bytes + memory_->workspace.bytes; }

    Program(const Program&) = delete;
    Program& operator=(const Program&) = delete;

  private:
    struct Memory {  // zero-filled pages that can grow; unmapped on destruction
        char* data = nullptr;
        size_t bytes = 0;
        void grow(size_t wanted);  // discards the contents
        Memory() = default;
        ~Memory();
    };

    struct Buffers {
        Memory arena, workspace;
    };

    // One op, and the function that turns a step's memory into its arguments.
    class Instruction {
      public:
        Instruction(std::string name, bool varies) : name(std::move(name)), varies(varies) {}
        virtual ~Instruction() = default;
        virtual void bind(const Frame& frame, int threads) = 0;
        virtual size_t workspace_bytes() const = 0;
        virtual void set_workspace(void* memory) = 0;
        virtual void append_phases(std::vector<Phase>& phases) const = 0;

        const std::string name;
        const bool varies;  // bound for every step; others only when the number of rows or threads changes
        int64_t runs = 0, nanoseconds = 0;
    };
    template <class Op, class Bind>
    class Recorded final : public Instruction {
      public:
        Recorded(std::string name, bool varies, Bind bind)
            : Instruction(std::move(name), varies), bind_(std::move(bind)) {
            for (int p = 0; p < Op::kPhases; ++p) bodies_[p] = {&op_, p};
        }
        void bind(const Frame& frame, int threads) override {
            bind_(op_, frame);
            op_.prepare(threads);
        }
        size_t workspace_bytes() const override {
            if constexpr (HasWorkspace<Op>) return op_.workspace_bytes();
            return 0;
        }
        void set_workspace(void* memory) override {
            if constexpr (HasWorkspace<Op>) op_.set_workspace(memory);
        }
        void append_phases(std::vector<Phase>& phases) const override {
            for (int p = 0; p < Op::kPhases; ++p) {
                if (op_.chunks(p) <= 0) continue;
                phases.push_back(make_phase(op_.chunks(p), bodies_[p]));
                if constexpr (Fetches<Op>) {
                    phases.back().fetch = [](const void* context, int thread) {
                        const auto& body = *static_cast<const PhaseBody<Op>*>(context);
                        body.op->fetch(body.phase, thread);
                    };
                }
            }
        }

      private:
        Op op_ = {};
        PhaseBody<Op> bodies_[Op::kPhases];
        const Bind bind_;
    };

    // The shapes that instructions which do not vary were bound for.
    struct Shape {
        int64_t tokens = -1, logit_rows = -1;
        int threads = 0;
        const char* arena = nullptr;  // a neighbour may have moved it
        const KernelTable* table = nullptr;
        bool operator==(const Shape&) const = default;
    };

    void lay_out(const Step& step);
    void bind(const Step& step);
    void collect_phases();
    void add_timings(const std::vector<int64_t>& opened);

    const std::vector<int64_t> widths_;
    std::vector<std::unique_ptr<Instruction>> instructions_;
    std::vector<float*> buffers_;
    const std::shared_ptr<Buffers> memory_;
    Shape bound_;
    std::vector<Phase> phases_;
    std::vector<int> first_phase_;  // index in phases_ for each instruction
    bool profiling_ = false;
};

}  // namespace pace
