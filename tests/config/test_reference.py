"""docs/config.md is what the schema says."""

import re
from pathlib import Path

from miles.config.reference import reference
from miles.config.schema import LayoutConfig, MilesConfig, SiteConfig


def test_the_committed_reference_equals_the_schema():
    assert Path("docs/config.md").read_text() == reference(), "run tools/gen_config_docs"


def test_every_section_and_option_is_listed():
    text = reference()
    for section in MilesConfig.model_fields:
        assert f"\n## [{section}]\n" in text
    assert "\n## [trainer.layout]\n" in text and "\n## [engine.speculative]\n" in text
    options = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    assert set(LayoutConfig.model_fields) | set(SiteConfig.model_fields) <= set(options)


def test_types_defaults_and_bounds_are_shown():
    text = reference()
    assert "| `tp` | whole number, ≥ 1 | `1` | Tensor parallel. |" in text
    assert '| `mode` | `async` \\| `sync` | `"async"` |' in text
    assert "| `steps` | whole number, ≥ 1 | **required** |" in text
    assert "| `max_total_tokens` | whole number, ≥ 1 | absent |" in text
