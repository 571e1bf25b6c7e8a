// Special registers: 32 lanes each, set when a warp starts.
#pragma once

#include <string>

namespace emulator {

struct Special {
  const char* name;
  int bytes;  // 0: predicate
  int offset;
};

enum SpecialIndex {
  kTidX,
  kTidY,
  kTidZ,
  kNtidX,
  kNtidY,
  kNtidZ,
  kCtaidX,
  kCtaidY,
  kCtaidZ,
  kNctaidX,
  kNctaidY,
  kNctaidZ,
  kLaneid,
  kWarpid,
  kNwarpid,
  kSmid,
  kNsmid,
  kLanemaskEq,
  kLanemaskLe,
  kLanemaskLt,
  kLanemaskGe,
  kLanemaskGt,
  kDynamicSmem,
  kTotalSmem,
  kClock,
  kClusteridX,
  kClusteridY,
  kClusteridZ,
  kNclusteridX,
  kNclusteridY,
  kNclusteridZ,
  kClusterCtaidX,
  kClusterCtaidY,
  kClusterCtaidZ,
  kClusterNctaidX,
  kClusterNctaidY,
  kClusterNctaidZ,
  kClusterCtarank,
  kClusterNctarank,
  kGridid,
  kClock64,
  kGlobaltimer,
  kSpecials
};

constexpr int kSpecialBytes = 256;  // one slot
constexpr const char* kSpecialNames[kSpecials] = {"%tid.x",
                                                  "%tid.y",
                                                  "%tid.z",
                                                  "%ntid.x",
                                                  "%ntid.y",
                                                  "%ntid.z",
                                                  "%ctaid.x",
                                                  "%ctaid.y",
                                                  "%ctaid.z",
                                                  "%nctaid.x",
                                                  "%nctaid.y",
                                                  "%nctaid.z",
                                                  "%laneid",
                                                  "%warpid",
                                                  "%nwarpid",
                                                  "%smid",
                                                  "%nsmid",
                                                  "%lanemask_eq",
                                                  "%lanemask_le",
                                                  "%lanemask_lt",
                                                  "%lanemask_ge",
                                                  "%lanemask_gt",
                                                  "%dynamic_smem_size",
                                                  "%total_smem_size",
                                                  "%clock",
                                                  "%clusterid.x",
                                                  "%clusterid.y",
                                                  "%clusterid.z",
                                                  "%nclusterid.x",
                                                  "%nclusterid.y",
                                                  "%nclusterid.z",
                                                  "%cluster_ctaid.x",
                                                  "%cluster_ctaid.y",
                                                  "%cluster_ctaid.z",
                                                  "%cluster_nctaid.x",
                                                  "%cluster_nctaid.y",
                                                  "%cluster_nctaid.z",
                                                  "%cluster_ctarank",
                                                  "%cluster_nctarank",
                                                  "%gridid",
                                                  "%clock64",
                                                  "%globaltimer"};

inline const Special* special_named(const std::string& name) {
  static Special found[kSpecials];
  static const bool ready = [] {
    for (int i = 0; i < kSpecials; ++i) found[i] = {kSpecialNames[i], i >= kGridid ? 8 : 4, i * kSpecialBytes};
    return true;
  }();
  for (int i = 0; ready && i < kSpecials; ++i)
    if (name == found[i].name) return &found[i];
  return nullptr;
}

}  // namespace emulator
