#!/usr/bin/env python3
"""The report in a real browser: pages of real runs and of made-up ones, as a headless Chromium sees them.

  TRAIN_GPT=./train_gpt python3 dev/tests/report_test.py [--screenshots=FOLDER]

Without a browser it says so and checks nothing; where CI is set that is an error.
"""
import html.parser
import json
import math
import os
import shutil
import subprocess
import sys
import unittest

import compare_test
from compare_test import compare, compared, script
from program import ROOT, TINY, ProgramTest, Run, data_flags, path, set_up, tear_down

SCREENSHOTS = None
WIDTH = 1200
HOSTILE = "</script><script>document.body.id='broken'</script><!-- <b>\"'&amp; \u6f22 \U0001f642"


def find_browser():
    """What answers --version. The second is what scripts/setup.sh --prefix=.deps --browser unpacked."""
    for name in ["chromium-headless-shell", os.path.join(ROOT, ".deps/usr/lib/chromium/chromium-headless-shell"),
                 "chromium", "google-chrome"]:
        try:
            if shutil.which(name) and subprocess.run([name, "--version"], capture_output=True).returncode == 0:
                return name
        except OSError:
            pass
    return None


BROWSER = find_browser()


class Page(html.parser.HTMLParser):
    """The elements of a page after its script has run: (tag, attributes, text within)."""

    def __init__(self, file):
        super().__init__()
        self.elements, self.open = [], []
        # Our own file, so no sandbox: containers often do not allow it one.
        command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                   f"--window-size={WIDTH},2000", "--enable-logging=stderr", "--virtual-time-budget=5000"]
        done = subprocess.run([*command, "--dump-dom", "file://" + file], capture_output=True, text=True, timeout=60)
        self.console = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
        self.feed(done.stdout)
        if SCREENSHOTS:
            name = os.path.join(SCREENSHOTS, os.path.basename(os.path.dirname(file)) + ".png")
            subprocess.run([*command, "--screenshot=" + name, "file://" + file], capture_output=True, timeout=60)

    def handle_starttag(self, tag, attributes):
        element = {"tag": tag, "text": "", "inside": [e.get("id") for e in self.open], **dict(attributes)}
        self.elements.append(element)
        if tag not in ("meta", "link", "br"):
            self.open.append(element)

    def handle_endtag(self, tag):
        while self.open and self.open.pop()["tag"] != tag:
            pass

    def handle_data(self, text):
        for element in self.open:
            element["text"] += text

    def find(self, tag, inside=None, **attributes):
        return [e for e in self.elements if e["tag"] == tag and (inside is None or inside in e["inside"]) and
                all(e.get(key) == value for key, value in attributes.items())]

    def charts(self):
        return [e["id"] for e in self.find("section")]

    def lines(self, chart):
        """{label: [(x, y), ...]} in units of the drawing."""
        return {e["data-label"]: [tuple(map(float, p.split())) for p in e["d"][1:].split("L")]
                for e in self.find("path", inside=chart, **{"class": "line"})}


@unittest.skipIf(BROWSER is None, "no browser")
class Report(ProgramTest):
    def page(self, file):
        """What holds for every page."""
        page = Page(file)
        self.assertEqual(page.console, [])
        self.assertTrue(page.charts())
        [head] = page.find("header")
        self.assertNotRegex(head["text"], "NaN|undefined|Infinity|null")
        [root] = page.find("html")
        self.assertEqual(root["data-width"], str(WIDTH))  # nothing is wider than the window
        for e in page.elements:
            for key, value in e.items():
                if key not in ("text", "inside"):
                    self.assertNotRegex(str(value), r"NaN|undefined|Infinity|\bnull\b", e)
            if e["tag"] == "path":
                self.assertRegex(e["d"], r"^M-?[\d.]+ -?[\d.]+(L-?[\d.]+ -?[\d.]+)*$")
            if e["tag"] in ("rect", "circle"):
                for key in ("x", "y", "width", "height", "cx", "cy"):
                    self.assertTrue(math.isfinite(float(e.get(key, 0))), e)
                self.assertGreaterEqual(float(e.get("width", 0)), 0, e)
        for chart in page.charts():
            [title] = page.find("h2", inside=chart)
            self.assertTrue(title["text"])
            for label, points in page.lines(chart).items():
                self.assertLessEqual(len(points), 2000, (chart, label))
        return page

    def table(self, page):
        """[{key: text}] of the rows below the head."""
        rows, cells = [], page.find("td", inside="table")
        for cell in cells:
            if cell["data-key"] == "label":
                rows.append({})
            rows[-1][cell["data-key"]] = cell["text"].replace("\u2212", "-")
        return rows

    def test_a_real_run(self):
        run = Run(("--steps=6", "--val-every=2", "--prompt=" + HOSTILE))
        page = self.page(os.path.join(run.out, "report.html"))
        self.assertEqual(page.charts()[:4], ["loss", "val_loss", "edq", "lost_frac"])
        for chart in ["grad_norm", "lr", "tokens_per_s", "optimizer_ms"]:
            self.assertEqual(list(page.lines(chart)), ["collage_plus"])
        self.assertEqual(len(page.lines("loss")["collage_plus"]), 6)
        self.assertEqual(len(page.lines("val_loss")["collage_plus"]), 3)
        self.assertEqual(len(page.find("rect", inside="memory", **{"class": "bar"})), len(run.run["memory"]))
        [row] = self.table(page)
        self.assertEqual(row["val_loss"], f"{run.val_losses()[-1]:.4f}")
        self.assertEqual(row["edq"], f"{sum(run.column('edq')) / 6:.3f}")
        # The hostile command is shown, and is text.
        [command] = page.find("code")
        self.assertEqual(command["text"], run.run["command"])
        self.assertIn(HOSTILE.replace("'", "'\\''"), command["text"])
        self.assertEqual(len(page.find("script")), 2)
        self.assertEqual([e for e in page.find("body") if "id" in e], [])

    def test_a_comparison_of_real_runs(self):
        out = path("compare")
        done = script("--precisions=bf16,collage_plus,fp32_master", "--seeds=1,2", "--out=" + out, "--", *TINY,
                      *data_flags(), "--steps=6", "--val-every=2", "--lr=1e-2", "--prompt=" + HOSTILE)
        self.assertEqual(done.returncode, 0, done.stderr)
        page = self.page(os.path.join(out, "report.html"))
        precisions = ["bf16", "collage_plus", "fp32_master"]
        self.assertEqual(page.charts(), ["loss", "val_loss", "difference", "val_difference", "edq", "lost_frac",
                                         "memory", "speed", "optimizer"])
        for chart in ["loss", "val_loss", "difference", "val_difference", "edq", "lost_frac"]:
            self.assertEqual(sorted(page.lines(chart)), precisions, chart)
            self.assertEqual(len(page.find("span", inside=chart)), 3)  # the legend
        self.assertEqual(len(page.find("path", inside="loss", **{"class": "raw"})), 6)
        for chart in ["speed", "optimizer"]:
            self.assertEqual(len(page.find("rect", inside=chart, **{"class": "bar"})), 3)
        # The reference minus itself lies on a level line.
        self.assertEqual(len({y for _, y in page.lines("difference")["fp32_master"]}), 1)

        comparison, _ = compared(out)
        rows = self.table(page)
        self.assertEqual([row["label"] for row in rows], precisions)
        for shown, row in zip(rows, comparison["table"]):
            interval = "reference" if row["label"] == "fp32_master" else \
                f"{row['difference']:+.4f} [{row['difference_low']:+.4f}, {row['difference_high']:+.4f}]"
            self.assertEqual(shown["difference"].replace("+0.0000", "0.0000"), interval.replace("+0.0000", "0.0000"))
            self.assertEqual(shown["val_loss"], f"{row['val_loss']:.4f}")
            self.assertEqual(shown["edq"], f"{row['edq']:.3f}")
            self.assertEqual(shown["lost_frac"], f"{100 * row['lost_frac']:.1f} %")
            self.assertEqual(shown["bytes_per_param"], f"{row['bytes_per_param']:.2f}")
            self.assertAlmostEqual(float(shown["optimizer_ms"]), row["optimizer_ms"], delta=0.005001)
            self.assertAlmostEqual(float(shown["tokens_per_s"].replace(",", "")), row["tokens_per_s"], delta=0.5001)

    def test_all_that_a_run_can_log(self):
        """Shadow, lock-step, tensor groups; 6,000 steps, so that lines are thinned."""
        folder = compare_test.write_run("full", [2 + 300 / (99 + step) for step in range(6000)], val_every=1000)
        add_columns(folder, lambda step: {
            "drift_theta": 1e-6 * step, "drift_m": 1e-3, "drift_v": 0, "grad_norm": 1 + 1 / step, "lr": 1e-3,
            **{f"lockstep.bf16.{key}": 0.5 for key in ["edq", "lost_frac", "drift_theta", "drift_m", "drift_v"]},
            **{f"{group}.{key}": 0.5 for group in ["embeddings", "h0.attn", "h0.mlp", "h0.norms", "ln_f"]
               for key in ["edq", "lost_frac", "stale_v_frac"]}})
        script("--out=" + path("full_out"), folder)
        page = self.page(path("full_out/report.html"))
        both = ["bf16", "bf16 (lock-step)"]
        for chart, labels in [("edq", both), ("lost_frac", both), ("drift_theta", both), ("drift_m", both),
                              ("drift_v", both[1:]), ("grad_norm", both[:1])]:  # a log scale has no 0
            self.assertEqual(list(page.lines(chart)), labels, chart)
        for chart in ["groups_edq", "groups_lost_frac"]:
            self.assertEqual(len(page.find("rect", inside=chart, **{"class": "cell"})), 5 * 60)
            axis = [e["text"] for e in page.find("text", inside=chart) if e["text"][0].isdigit()]
            self.assertEqual((axis[0], len(axis)), ("1", 5))  # from the first step on

    def test_runs_that_went_wrong(self):
        """One that diverged far away, one with nothing but null, one with a single step, and no reference."""
        folders = [compare_test.write_run("bad_far", [3.0] * 30 + [1e30] * 20),
                   compare_test.write_run("bad_null", [None] * 50, precision="bf16_sr"),
                   compare_test.write_run("bad_short", [3.0], precision="fp32", val_every=1, steps=50)]
        script("--out=" + path("bad_out"), *folders)
        page = self.page(path("bad_out/report.html"))
        self.assertEqual(sorted(page.lines("loss")), ["bf16", "fp32"])
        self.assertEqual(len(page.find("path", inside="loss", **{"class": "raw"})), 2)
        # What diverged leaves the chart at the top, and the sound losses keep its height.
        for chart in ["loss", "val_loss"]:
            self.assertLess(page.lines(chart)["bf16"][-1][1], 0)
        self.assertNotIn("difference", page.charts())
        self.assertEqual([row["notes"] for row in self.table(page)],
                         ["diverged at step 31", "diverged at step 1", "ended early at step 1 of 50"])

    def test_many_labels(self):
        """Twelve long labels, three seeds: all fit into the window, all lines can be told apart."""
        folders = [compare_test.write_run(f"many_{i}_{seed}", [3.0 + i / 10] * 4, seed=seed, precision=f"precision_{i}",
                                          **{"weight-decay": i / 7}) for i in range(12) for seed in (1, 2, 3)]
        script("--out=" + path("many_out"), *folders)
        page = self.page(path("many_out/report.html"))
        lines = page.find("path", inside="loss", **{"class": "line"})
        self.assertEqual(len({(e["stroke"], e["stroke-dasharray"]) for e in lines}), 12)

    def test_the_template_alone(self):
        page = Page(compare.TEMPLATE)
        self.assertEqual((page.console, page.charts()), ([], []))


def add_columns(folder, values):
    """Adds values(step) to each row of a run."""
    file = os.path.join(folder, "metrics.jsonl")
    with open(file, encoding="utf-8") as f:
        first, *rows = map(json.loads, f)
    with open(file, "w", encoding="utf-8") as f:
        for row in [first, *({**row, **values(row["step"])} for row in rows)]:
            print(json.dumps(row), file=f)


def setUpModule():
    set_up()


def tearDownModule():
    tear_down()


if __name__ == "__main__":
    if BROWSER is None:
        print("no headless browser: the report's pages are not checked (scripts/setup.sh --browser installs one)")
        sys.exit(1 if os.environ.get("CI") else 0)
    for word in [word for word in sys.argv if word.startswith("--screenshots=")]:
        SCREENSHOTS = word.split("=")[1]
        sys.argv.remove(word)
    unittest.main()
