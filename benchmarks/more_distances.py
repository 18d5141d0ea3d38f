"""What prompt tokens for more distances could bring at most: is a larger m worth training?

The acceptance table is extended by distances that are as good as its last one, which later distances never are: guesses
get worse the further ahead they are. What the best tree gains with them is an upper bound of what training them brings.

    python benchmarks/more_distances.py --acceptance smollm2-135m-instruct-m3 --distances 5 --budgets 8,16,32,64,128
"""

import argparse

import treeopt
from treeopt.bundled import DEFAULT_TABLE, load_acceptance


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--acceptance", default=DEFAULT_TABLE, help="table that comes with treeopt, or a file")
    parser.add_argument("--distances", type=int, default=5)
    parser.add_argument("--budgets", default="4,8,16,32,64,128,256")
    arguments = parser.parse_args()

    table, _ = load_acceptance(arguments.acceptance)
    num_now = len(table.marginals)
    longer = [*table.marginals, *[table.marginals[-1]] * (arguments.distances - num_now)]
    more = treeopt.AcceptanceTable.from_marginals(longer)
    print(f"{arguments.acceptance}: tokens per step with {num_now} and at most with {arguments.distances} distances")
    for budget in map(int, arguments.budgets.split(",")):
        now = treeopt.search(table, budget).acceptance_length
        then = treeopt.search(more, budget).acceptance_length
        print(f"{budget:6d}{now:10.4f}{then:10.4f}{then / now - 1:+9.2%}")


if __name__ == "__main__":
    main()
