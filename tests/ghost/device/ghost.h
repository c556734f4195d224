// What the parts of the ghost share: its log, and where a pointer lies.
#pragma once
#include <stddef.h>

// A line in the file that GHOST_LOG names, with ".PID" after it; nothing without that variable.
void ghost_log(const char *format, ...) __attribute__((format(printf, 1, 2)));

// A kernel was launched: a line "KIND NAME", with "captured" before it while a CUDA graph records.
void ghost_launch(const char *kind, const char *name);

enum ghost_place { PAGEABLE, DEVICE, PINNED };
enum ghost_place ghost_place(const void *pointer);

// Bytes that are really copied or filled on the device. Larger tensors keep what they have, so their pages never exist.
#define GHOST_SMALL (1ul << 20)
void ghost_move(void *to, const void *from, size_t bytes); // nothing if it is more

int ghost_attribute(int attribute); // of the device, by CUDA's number
extern __thread int ghost_device;
