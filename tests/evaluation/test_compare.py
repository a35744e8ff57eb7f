"""`evaluate --compare`: two reports beside each other."""

import json
import shutil

from clover_jax import cli, evaluate


def test_two_reports_are_set_side_by_side(finished, folder, capsys):
    other = folder / "other"
    shutil.copytree(finished.output, other)
    report = finished.report
    report["manifest"]["prompts"]["hash"] = "f" * 64
    report["manifest"]["base"]["chat_template"] = "e" * 64
    report["manifest"]["hardware"]["cores"] = 999
    report["manifest"]["flags"]["int8"] = ["base", "draft"]
    (other / "report.json").write_text(json.dumps(report))
    arguments = [f"--compare={finished.output},{other}", f"--output={folder / 'beside'}"]
    assert cli.run(evaluate.main, evaluate.define_flags, arguments) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out.splitlines()[-1])
    assert list(result["tau"]) == ["out: chain", "out: short", "other: chain", "other: short"]
    assert result["tau"]["out: short"] == finished.result["tau"]["short"]
    assert result["differences"]["texts"] == [
        f"base chat_template {finished.report['manifest']['base']['chat_template']} against "
        "eeeeeeeeeeee",
        f"prompts {finished.report['manifest']['prompts']['hash'][:12]} against ffffffffffff",
        "int8 base False against True",
    ]
    assert "not the same texts: prompts" in printed.err
    assert "not the same conditions for times: cores" in printed.err
    assert (folder / "beside" / "compare.md").read_text().startswith("# out against other")
