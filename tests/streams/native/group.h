// Process groups of the machine: ranks are threads of this process, each with a group object under its own name.
#pragma once

#include <string>

namespace streams {

// A rank's group, registered as `name`. Groups of the same world exchange messages. backends: "devices" as a group made
// for NCCL, "cpu" as one for gloo, "both" as one for both.
void make_group(const std::string& name, const std::string& world, int rank, int size, const std::string& backends);
void abort_groups();  // a rank has failed: nobody waits for it any more
void destroy_groups();

}  // namespace streams
