// The small messages of fixed size with which ranks compare what they are about to do. They share a channel,
// so each says first which kind it is: where ranks are at different places, they can tell each other where.
#pragma once

#include <cstdint>
#include <string>

#include <pacer/collectives/agreement.h>

namespace pacer::detail {

constexpr int64_t kCallMessage = 0x6c6c6163;  // "call"

// What is compared over all ranks before a call that does not say `agreed`.
struct CallRecord {
  int64_t kind = kCallMessage;
  char operation[32] = {};
  int64_t number = 0;    // of the collective on this Communicator
  int64_t dtype = 0;     // -1: there is none
  int64_t elements = 0;  // -1: they may differ, or there are none
  int64_t root = 0;
  int64_t tensors = 1;
  int64_t list = 0;  // the checksum of their dtypes and sizes, where they are several
};
static_assert(sizeof(CallRecord) == sizeof(RankStatus),
              "messages of one size, so that none waits for the rest");

// What the rank that sent it is about to do, for messages: "calls ...", "takes a step ...".
std::string describe_agreement(const void* message);

// Whether it is a CallRecord.
bool is_call(const void* message);

}  // namespace pacer::detail
