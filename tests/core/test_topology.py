from dataclasses import replace

from sdcwatch.core.topology import Topology


def test_a_node_is_a_fault_domain_unless_each_gpu_is(topology):
    by_node = topology("2+1")
    assert by_node.world_size == 3
    assert by_node.domains == ("node-0", "node-0", "node-1")
    assert by_node.domain_sizes == {"node-0": 2, "node-1": 1}
    by_gpu = topology("2+1", "gpu")
    assert len(set(by_gpu.domains)) == 3
    assert set(by_gpu.domain_sizes.values()) == {1}
    assert by_gpu.nodes == by_node.nodes == ("node-0", "node-1")


def test_ranks_of_a_node_need_not_be_neighbours(topology):
    ranks = topology("3x1").ranks
    scattered = Topology(
        (ranks[0], replace(ranks[1], node="other"), replace(ranks[2], node="node-0"))
    )
    assert scattered.domains == ("node-0", "other", "node-0")
    assert scattered.domain_sizes == {"node-0": 2, "other": 1}


def test_a_device_is_labelled_by_its_uuid_or_by_its_place(topology):
    info = topology("1x2").ranks[1]
    assert info.gpu == "cpu-sim-node-0-1"
    assert replace(info, gpu_uuid=None).gpu == "node-0/1"
