"""Plan a GPT for clusters that are not there, and compare them; nothing is trained, and no device is needed.

    python examples/09_plan_for_a_cluster.py

The same from a shell: `lightning-pipe plan model=gpt-125m cluster=rtx4090_4 samples=32 planner=dapple`.
For real size: `gpt-13b` on `a100_4x8_ethernet_100g`, and your own cluster as a file (docs/clusters.md).
"""

from lightning_pipe.cli import main as lightning_pipe

CLUSTERS = ("rtx4090_4", "rtx3090_4x2_ethernet_10g")


def main() -> None:
    for cluster in CLUSTERS:
        print(f"--- {cluster}")
        words = ["model=gpt-125m", f"cluster={cluster}", "samples=32", "planner=dapple", f"out=plan_{cluster}.yaml"]
        if lightning_pipe(["plan", *words]):
            raise SystemExit(f"no plan for {cluster}")


if __name__ == "__main__":
    main()
