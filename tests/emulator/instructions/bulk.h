// Parts of bulk and tensor copies that two files share.
#pragma once

#include "../machine/decoder.h"

namespace emulator {

int bulk_rank(Decoder& s);                           // takes .tensor and .1d to .5d; 0: a linear copy
Operand bulk_far_side(Decoder& s, int i, int rank);  // [map, {x, y}] or [address]
void bulk_store(Decoder& s, int rank);               // bulk_store.cpp
void bulk_commit(Decoder& s);
void bulk_wait(Decoder& s);

}  // namespace emulator
