"""The deterministic simulator: many real protocol cores in one process, in virtual time, from one seed.

After FoundationDB and TigerBeetle: the cores are the ones that nodes run; the network, the disks, the
trainers, the clocks and everything that goes wrong are played from one seed, so that a seed and a commit
replay any failure. Safety is checked all along, liveness once all faults have been healed.

    python -m tests.sim --seeds 200              many seeds, on all processors
    python -m tests.sim --seed 17 --trace        one seed, told line by line

=============== ===========================================================================
`loop`          virtual time: a queue of actions
`trace`         what happened, as a hash and, if wanted, as lines
`network`       hosts, paths, streams with the manners of TCP, requests for chunks
`weather`       what is wrong with the network now: splits of all shapes, loss, corruption
`exchange`      one HTTP request, for a chunk
`disk`          what survives a crash, a power cut, a lost disk
`trainer`       a stand-in that publishes small real payloads at its own speed
`fold`          Phi, merged incrementally and from scratch
`process`       what can be stopped, killed and started again
`node`          the adapter: carries out the core's effects, as the daemon does
`archive`       a node's past: snapshots adopted and sealed, rounds closed
`transfers`     a node's chunks on their way
`stage`         what nodes share, and what makes each different
`liar`          a member that equivocates, forges, withholds and lies
`gang`          several, each for itself and together
`faults`        storms: what goes wrong, from when to when
`scenario`      the choice of everything by a seed
`audit`         checkers of safety and bounds, all along
`spread`        a checker of how soon payloads are everywhere
`verdicts`      checkers of liveness: convergence, progress, detection
`world`         puts it together and runs one seed
`result`        what came of a seed
`seeds`         many of them, on all processors
`memo`          caches of pure functions, which make it fast
`mutants`       deliberately broken variants, which the checkers must find
=============== ===========================================================================
"""
