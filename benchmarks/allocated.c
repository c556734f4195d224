/* Count the bytes that malloc has allocated in this process.
 * benchmarks/planner.py compiles and preloads this library. */
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

static _Atomic long current_bytes, peak_bytes;

/* Count a block, unless it is NULL, and return it. */
static void *add_block(void *block)
{
    if (!block)
        return block;
    long size = (long)malloc_usable_size(block);
    long total = atomic_fetch_add(&current_bytes, size) + size;
    long peak = peak_bytes;
    /* If another thread changes the peak, compare again. */
    while (total > peak && !atomic_compare_exchange_weak(&peak_bytes, &peak, total))
        ;
    return block;
}

static void remove_block(void *block)
{
    if (block)
        atomic_fetch_sub(&current_bytes, (long)malloc_usable_size(block));
}

void *malloc(size_t size) { return add_block(__libc_malloc(size)); }
void *calloc(size_t count, size_t size) { return add_block(__libc_calloc(count, size)); }
void *memalign(size_t align, size_t size) { return add_block(__libc_memalign(align, size)); }
void *aligned_alloc(size_t align, size_t size) { return add_block(__libc_memalign(align, size)); }

void free(void *block)
{
    remove_block(block);
    __libc_free(block);
}

void *realloc(void *block, size_t size)
{
    remove_block(block);
    void *moved = __libc_realloc(block, size);
    /* If realloc fails, the old block stays allocated. With size 0, it frees the block. */
    add_block(moved || !size ? moved : block);
    return moved;
}

int posix_memalign(void **block, size_t align, size_t size)
{
    *block = add_block(__libc_memalign(align, size));
    return *block ? 0 : ENOMEM;
}

/* Return the bytes that are allocated now. */
long bytes_now(void) { return current_bytes; }

/* Return the largest number of bytes since the previous call, and reset the peak. */
long bytes_most(void) { return atomic_exchange(&peak_bytes, current_bytes); }
