// Forms of cp, st and red that other files decode.
#pragma once

#include "../machine/decoder.h"

namespace emulator {

void bulk(Decoder& s);             // cp.async.bulk...: bulk.cpp
void bulk_reduce(Decoder& s);      // cp.reduce.async.bulk...: bulk.cpp
void cp_async_arrive(Decoder& s);  // cp.async.mbarrier.arrive: mbarrier.cpp
void async_store(Decoder& s);      // st.async: async_store.cpp
void async_reduce(Decoder& s);     // red.async: async_store.cpp

}  // namespace emulator
