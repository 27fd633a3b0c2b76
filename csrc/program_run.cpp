// The executor of recorded programs: memory, binding, running and timings. The instructions are in csrc/program.cpp.
#include "pace/largest.h"
#include "pace/program.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>

namespace pace {

// ---- Memory

Program::Memory::~Memory() {
    if (data) munmap(data, bytes);
}

void Program::Memory::grow(size_t wanted) {
    if (wanted <= bytes) return;
    constexpr size_t kPage = 4096;
    const size_t rounded = (wanted + kPage - 1) / kPage * kPage;
    void* const memory = mmap(nullptr, rounded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    // A block of a prefill touches 128 rows; with small pages each of them would need its own page.
    madvise(memory, rounded, MADV_HUGEPAGE);
    if (data) munmap(data, bytes);
    data = static_cast<char*>(memory);
    bytes = rounded;
}

float* Program::Frame::at(Value value) const {
    return value.buffer == Value::kLogits ? step.logits : program.buffers_[value.buffer];
}

// ---- Running

void Program::run(const Step& step) {
    ThreadPool::Turn turn(ThreadPool::instance());
    bind(step);
    if (step.largest) std::fill_n(step.largest, step.logit_rows, kNoCandidate);
    std::vector<int64_t> opened(profiling_ ? phases_.size() + 1 : 0);
    turn.run(phases_.data(), int(phases_.size()), profiling_ ? opened.data() : nullptr);
    for (int64_t row = 0; step.largest && row < step.logit_rows; ++row)
        step.largest[row] = index_of_candidate(step.largest[row]);
    if (profiling_) add_timings(opened);
}

// Places the buffers one after the other, each at the start of a cache line.
void Program::lay_out(const Step& step) {
    const auto rounded = [&](int64_t width) { return (width * step.tokens * int64_t(sizeof(float)) + 63) / 64 * 64; };
    size_t total = 0;
    for (const int64_t width : widths_) total += rounded(width);
    memory_->arena.grow(total);
    buffers_.clear();
    char* next = memory_->arena.data;
    for (const int64_t width : widths_) {
        buffers_.push_back(reinterpret_cast<float*>(next));
        next += rounded(width);
    }
}

void Program::bind(const Step& step) {
    const int threads = ThreadPool::instance().num_threads();
    Shape shape = {step.tokens, step.logit_rows, threads, memory_->arena.data, &kernels()};
    const bool reshaped = shape != bound_;
    bound_ = {};  // set again once all instructions are bound, because some may throw
    if (reshaped) lay_out(step);
    const Frame frame = {*this, step};
    size_t workspace = 0;
    for (const auto& instruction : instructions_) {
        if (reshaped || instruction->varies) instruction->bind(frame, threads);
        workspace = std::max(workspace, instruction->workspace_bytes());
    }
    memory_->workspace.grow(workspace);
    for (const auto& instruction : instructions_) instruction->set_workspace(memory_->workspace.data);
    collect_phases();
    shape.arena = memory_->arena.data;
    bound_ = shape;
}

void Program::collect_phases() {
    phases_.clear();
    first_phase_.clear();
    for (const auto& instruction : instructions_) {
        first_phase_.push_back(int(phases_.size()));
        instruction->append_phases(phases_);
    }
    first_phase_.push_back(int(phases_.size()));
}

// ---- Inspecting

void Program::set_profiling(bool on) {
    const ThreadPool::Turn turn(ThreadPool::instance());
    profiling_ = on;
    for (const auto& instruction : instructions_) instruction->runs = instruction->nanoseconds = 0;
}

void Program::add_timings(const std::vector<int64_t>& opened) {
    for (size_t i = 0; i < instructions_.size(); ++i) {
        instructions_[i]->runs += 1;
        instructions_[i]->nanoseconds += opened[first_phase_[i + 1]] - opened[first_phase_[i]];
    }
}

std::vector<Program::Timing> Program::timings() const {
    const ThreadPool::Turn turn(ThreadPool::instance());
    std::vector<Timing> timings;
    for (const auto& instruction : instructions_) {
        timings.push_back({instruction->name, instruction->runs, 1e-9 * double(instruction->nanoseconds)});
    }
    return timings;
}

}  // namespace pace
