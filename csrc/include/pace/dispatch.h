// Which tables of kernels there are, and which is in use.
#pragma once

#include <string>
#include <vector>

#include "pace/kernels.h"

namespace pace {

// Changes the table in use. Throws std::invalid_argument for a name that is unknown, that this CPU lacks, or that this
// build lacks.
// Packed weights carry the layout of the table they were packed for; other tables refuse them if their layout differs.
void select_isa(const std::string& name);

// Tables in this build, best first; those for tests come last.
std::vector<std::string> built_isas();

// Those of them that this CPU can run.
std::vector<std::string> available_isas();

// The best that this CPU can run, in this build or not.
const char* best_isa();

}  // namespace pace
