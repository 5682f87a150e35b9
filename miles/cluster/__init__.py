"""The Slurm job around a run: rendering, submission, supervision, status, preflight, and the same without Slurm under `mpiexec`.

    render      config + site profile -> sbatch script (pure)
    submit      submitit executor for heterogeneous jobs; local = the same in the foreground
    start       finds or creates the run directory of a job
    supervise   starts the two steps of an attempt and keeps them alive; `decide` is its pure core
    launch      srun / mpiexec command lines (pure); `rank` wraps each MPI rank, ends it when it is frozen (`silence`), and records how it ended
    slurm       the Slurm commands used, and the environment they may see
    preflight   what can be known to fail before the job waits in a queue

Must not know about learning.
"""
