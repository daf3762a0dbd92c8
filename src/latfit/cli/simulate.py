"""`latfit simulate`: policies, a serving engine, or a study; each sub-verb in a module of its own."""

from latfit.cli.options import group_of_verbs, subverb
from latfit.cli.simulate_engine import engine
from latfit.cli.simulate_policies import policies
from latfit.cli.simulate_study import study

simulate = group_of_verbs(
    """Simulate batching policies or a serving engine under a load.

    \b
    latfit simulate policies --policy three-stage --policy gpu-only --rate 500/s
    latfit simulate engine --fit gpu.fit.json --kv-blocks 2588 --rate 2/s \\
        --lengths 512:128
    latfit simulate study --nominal gpu:launch=8ms,slope=0.05ms \\
        --nominal amx:p50=2ms
    """
)
for verb in (policies, engine, study):
    subverb(simulate)(verb)
