// Whether a product of one row with quantised weights fetches ahead by instructions, on tables that need few of them for
// a cache line. The processor's own prefetcher suffices on Zen 4, where such instructions cost up to a tenth. On Zen 5
// they save more than that (benchmarks/RESULTS.md, "Decode of small models"). Defined in cpu.cpp.
#pragma once

namespace pace {

extern const bool kPrefetchesOneRow;

}  // namespace pace
