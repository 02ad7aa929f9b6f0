"""The deterministic simulator: many real protocol cores in one process, in virtual time, from one seed.

This follows FoundationDB and TigerBeetle. The cores are the ones that nodes run. The network, the disks, the
trainers, the clocks and all faults are simulated from one seed, so that a seed and a commit replay any
failure. Safety is checked all along, liveness once all faults have been healed.

    python -m tests.sim --seeds 200              many seeds, on all processors
    python -m tests.sim --seed 17 --trace        one seed, with a trace line by line

=============== ===========================================================================
`loop`          virtual time: a queue of actions
`trace`         what happened, as a hash and, if wanted, as lines
`network`       hosts, paths, streams that behave like TCP's
`weather`       what is wrong with the network now: splits of all shapes, loss, corruption
`disk`          what survives a crash, a power cut, a lost disk
`trainer`       a stand-in that publishes small real payloads at its own speed
`fold`          Phi, merged incrementally and from scratch
`process`       what can be stopped, killed and started again
`node`          the adapter: carries out the core's effects, as the daemon does
`archive`       a node's past: snapshots adopted and sealed, rounds closed
`transfers`     a node's chunk transfers, each one HTTP request
`stage`         what nodes share, and the traits of each
`liar`          members that equivocate, forge, withhold and lie, alone and together
`faults`        storms: what goes wrong, from when to when
`scenario`      draws everything about a run from its seed
`audit`         checkers of safety, of bounds, and of how fast payloads spread, all along
`verdicts`      checkers of liveness: convergence, progress, detection
`world`         puts all of it together and runs one seed
`seeds`         many seeds, on all processors
`memo`          caches of pure functions, for speed
`mutants`       deliberately broken variants that the checkers must find
=============== ===========================================================================
"""
