"""Plan a GPT for clusters that are not at hand, and compare them; nothing is trained, and no device is needed.

    python examples/09_plan_for_a_cluster.py

The same from a shell: `lightning-pipe plan model=gpt-125m cluster=rtx4090_4 samples=32 planner=dapple`.
For real size: `gpt-13b` on `a100_4x8_ethernet_100g`, and your own cluster as a file (docs/clusters.md).
A module of yours takes the place of the name: `lightning_pipe.plan(Net(), batch=batch, cluster=...)`.
"""

import lightning_pipe

CLUSTERS = ("rtx4090_4", "rtx3090_4x2_ethernet_10g")


def main() -> None:
    for cluster in CLUSTERS:
        planned = lightning_pipe.plan("gpt-125m", cluster=cluster, samples=32, planner="dapple")
        planned.save(f"plan_{cluster}.yaml")
        print(f"--- {cluster}: {planned.step_s:.3g} s per step, {planned.tokens_per_s:,.0f} tokens/s")
        print(planned)
        print(planned.reasons)
        print(f"Wrote the plan to plan_{cluster}.yaml")


if __name__ == "__main__":
    main()
