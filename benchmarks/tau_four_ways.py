"""Tokens per step of three designs on held-out text: by independence, by joint counts, by replay, and really decoded.

Designs are searched on one half of the held-out prompts and judged on the other. Replay must give the decoder's step
count on every text exactly; where rounding in batches changed a text itself, that text is named and left out.

    python benchmarks/tau_four_ways.py --texts 12 --budgets 8,16,32
"""

import argparse
import json

from ppd_runtime import PromptGuesses, Settings, generate, load_model, read_prompts
from treeopt import search
from treeopt.app.evaluate import assess
from treeopt.app.measure import choose_prompt_tokens, measure
from treeopt.app.texts import answers_to, shipped_prompts
from treeopt.replay import replay_sequences


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--prompt-tokens", help="folder; the shipped ones without it")
    parser.add_argument("--texts", type=int, default=12, help="texts to judge on; as many more are searched on")
    parser.add_argument("--budgets", default="8,16,32")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    arguments = parser.parse_args()

    loaded = load_model(arguments.model)
    tokens = choose_prompt_tokens(loaded, arguments.prompt_tokens)
    prompts = read_prompts(shipped_prompts("prompts-held-out.jsonl"))
    texts = answers_to(loaded, prompts, max_new_tokens=arguments.max_new_tokens)
    searched = measure(loaded, tokens, texts[0::2], source="searched on")
    judged_texts = [text for text in texts[1::2] if text.num_new_tokens >= 2][: arguments.texts]
    judged = measure(loaded, tokens, judged_texts, source="judged on")

    print("budget  searched  independent   joint  replay  decoded  texts with equal steps")
    for budget in map(int, arguments.budgets.split(",")):
        design = search(searched.table, budget)
        models = assess(design, judged.table, record=judged.record)
        replayed = replay_sequences(design, judged.record)
        new_tokens = steps = equal = other_text = 0
        for text, expected in zip(judged_texts, replayed, strict=True):
            (run,) = generate(
                loaded,
                [text.token_ids[: text.num_prompt_tokens]],
                design=design,
                source=PromptGuesses(loaded, tokens),
                settings=Settings(max_new_tokens=arguments.max_new_tokens),
            )
            if run.token_ids != text.token_ids[text.num_prompt_tokens :]:
                other_text += 1
                continue
            equal += run.run.num_steps == sum(expected.steps_per_state)
            new_tokens += run.run.num_new_tokens - 1
            steps += run.run.num_steps
        entry = {
            "budget": budget,
            "searched_tau": design.acceptance_length,
            "independent_tau": models.independent.acceptance_length,
            "joint_tau": models.joint.acceptance_length,
            "replay_tau": models.replayed.acceptance_length,
            "decoded_tau": new_tokens / max(1, steps),
            "texts_with_equal_steps": equal,
            "texts_with_other_tokens": other_text,
            "texts": len(judged_texts),
        }
        taus = [entry[name] for name in ("searched_tau", "independent_tau", "joint_tau", "replay_tau", "decoded_tau")]
        agree = f"{equal} of {len(judged_texts) - other_text} ({other_text} with other tokens)"
        print("{:>6} {:>9.3f} {:>12.3f} {:>7.3f} {:>7.3f} {:>8.3f}  {}".format(budget, *taus, agree))
        print(json.dumps(entry), flush=True)


if __name__ == "__main__":
    main()
