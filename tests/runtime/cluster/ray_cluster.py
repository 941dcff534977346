"""Keeps a Ray cluster of several raylets on this machine: a head and N nodes, with one CPU each.

Prints address and raylets as JSON; each line of input is answered, its end shuts everything down.
"""

from __future__ import annotations

import json
import sys

from ray.cluster_utils import Cluster

SMALL = {"object_store_memory": 80 * 2**20, "node_ip_address": "127.0.0.1"}


def main(count: int) -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, **SMALL})
    nodes = [cluster.add_node(num_cpus=1, **SMALL) for _ in range(count)]
    tell(address=cluster.address, raylets=dict(map(raylet, nodes)))
    for line in sys.stdin:
        cpus = json.loads(line)["add"]
        tell(raylets=dict([raylet(cluster.add_node(num_cpus=cpus, **SMALL))]))
    cluster.shutdown()


def raylet(node) -> tuple[str, int]:
    return node.node_id, node.all_processes["raylet"][0].process.pid


def tell(**content) -> None:
    print(json.dumps(content), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
