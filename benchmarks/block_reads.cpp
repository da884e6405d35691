// How fast two threads read half of a matrix, in blocks that they skip between, with nothing else to do: the limit
// of a gated layer that doesn't fit the cache.
//
//     g++ -O3 -march=native -pthread benchmarks/block_reads.cpp -o build/block_reads && build/block_reads
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <random>
#include <thread>
#include <vector>

namespace {

constexpr size_t LINE = 64, MEMORY = size_t(512) << 20, READ = size_t(32) << 20;
volatile int64_t sink;

// Reads the blocks in this order, and fetches lines that come so many lines later.
void read_blocks(const char* base, const std::vector<size_t>& order, size_t block, size_t ahead) {
  const size_t lines = block / LINE;
  size_t next = ahead / lines, line_of_next = ahead % lines;
  int64_t sum = 0;
  for (const size_t number : order) {
    const auto* at = reinterpret_cast<const int64_t*>(base + number * block);
    for (size_t line = 0; line < lines; ++line, at += LINE / sizeof *at) {
      if (ahead && next < order.size()) {
        __builtin_prefetch(base + order[next] * block + line_of_next * LINE);
        if (++line_of_next == lines) line_of_next = 0, ++next;
      }
      for (size_t i = 0; i < LINE / sizeof *at; ++i) sum += at[i];
    }
  }
  sink = sum;
}

// Gigabytes a second of two threads, the median of some runs.
double rate(const char* memory, size_t block, bool half, size_t ahead, std::mt19937& random) {
  std::vector<double> rates;
  for (int run = 0; run < 7; ++run) {
    std::vector<size_t> order[2];
    size_t bytes = 0;
    for (size_t thread = 0; thread < 2; ++thread) {
      const size_t blocks = MEMORY / 2 / block, wanted = READ / block;
      size_t at = thread * blocks + run * wanted;
      for (; order[thread].size() < wanted; ++at)
        if (!half || random() % 2) order[thread].push_back(at % (2 * blocks));
      bytes += wanted * block;
    }
    const auto start = std::chrono::steady_clock::now();
    std::thread other([&] { read_blocks(memory, order[1], block, ahead); });
    read_blocks(memory, order[0], block, ahead);
    other.join();
    rates.push_back(bytes / std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / 1e9);
  }
  std::nth_element(rates.begin(), rates.begin() + 3, rates.end());
  return rates[3];
}

}  // namespace

int main() {
  auto* memory = static_cast<char*>(mmap(nullptr, MEMORY, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  madvise(memory, MEMORY, MADV_HUGEPAGE);
  for (size_t i = 0; i < MEMORY; i += LINE) memory[i] = char(i);
  std::mt19937 random(1);
  std::puts("| block, KB | lines fetched ahead | all blocks, GB/s | half of them, GB/s |\n|--:|--:|--:|--:|");
  for (const size_t block : {4096, 8192, 16384})
    for (const size_t ahead : {0, 64, 256})
      std::printf("| %zu | %zu | %.1f | %.1f |\n", block / 1024, ahead, rate(memory, block, false, ahead, random),
                  rate(memory, block, true, ahead, random));
}
