"""How much slower is training when most rows are elsewhere: on SSD behind RAM, or in system memory behind a GPU?

On a CPU: M1's tables of 64 wide rows with row-wise Adagrad, 28 ids a bag, batches of 200; ids are Criteo-like, that is
Zipf-distributed with the exponent at which 1 % of a table's rows take 90 % of its accesses, fresh in every step, the hot rows of
each table strewn over it. The `ssd` store keeps all records in a file and the rows of 10 % in RAM. Every row is on disk before
anything is timed, and the cache is warm: it began with the hottest rows, and many steps went by since.

Measured in turns, several rounds of each, medians:
- `ram`: the same work with all rows in RAM.
- reads of one record each, of random rows of the same file, nothing else to do, for several numbers of reads in flight, of which
  the best counts.
- `ssd`: with the next batches prefetched, as in training, and steps back to back. The first and last steps of a round, in
  which nothing is prefetched, do not count.

The work is look-up + update (`tables`) and the whole training step with M1's MLPs (`step`). `possible` is the lesser of the rate
of `ram` and the rate at which the disk alone could read what the cache misses. It leaves out what the disk also has to do: every
row is trained on, so as many rows go to disk as come from it. `ssd_over_possible` is the rate of `ssd` over it, the lesser of the
two works.

The page cache hides nothing: the file is opened for direct I/O (the command refuses a disk that has none), and
`device_read_share` is what the system says this process fetched from the device, over what the store asked for. What a
hypervisor or the device itself keeps in memory serves both sides alike.
"""

from __future__ import annotations

import tempfile

from benchmarks.harness import arguments


def main() -> None:
    parser = arguments(__doc__, devices=("cpu", "cuda"), with_shapes=True)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on which disk the file of rows goes, on a CPU")
    options = parser.parse_args()
    if options.device == "cuda":
        from benchmarks import cache_gpu

        cache_gpu.run(options)
    else:
        from benchmarks import cache_ssd

        cache_ssd.run(options)


if __name__ == "__main__":
    main()
