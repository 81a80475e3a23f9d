"""What a page of metrics says. Owns how a sample is looked up: by name and labels, whatever the
model's name."""

from prometheus_client.parser import text_string_to_metric_families

from stratakv.serve.metric_families import MODEL


def scraped(text: str) -> dict[tuple, float]:
    """Values by name and the values of labels, sorted."""
    return {
        (sample.name, *sorted(v for k, v in sample.labels.items() if k != MODEL)): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
