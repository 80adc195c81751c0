"""Temperature scaling of a plain model."""

import numpy as np
import pytest
import torch
from torch import nn

from predictive.calibration.test_scale import loader
from propagauss import InputError
from propagauss.baselines import MAP, TemperatureScaling
from propagauss.metrics import nlpd
from propagauss.predictive.classifier import Classifier


def test_temperature_against_a_grid():
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    x = torch.randn(300, 5)
    y = torch.multinomial((model(x) / 2.5).softmax(-1), 1).squeeze(1)
    scaled = TemperatureScaling(model)
    before = nlpd(scaled(x), y)
    assert scaled.fit(loader(x, y)) is scaled and scaled.fit_report is not None
    assert scaled.fit_report.nlpd_before == pytest.approx(before, rel=1e-5)
    values = {float(t): nlpd((model(x) / t).log_softmax(-1), y) for t in np.logspace(-2, 2, 201)}
    assert nlpd(scaled(x), y) <= min(values.values()) + 1e-6
    assert scaled.temperature == pytest.approx(min(values, key=lambda t: values[t]), rel=0.05)


@pytest.mark.filterwarnings("ignore:the temperature is at the end")
def test_temperatures_skip_the_labels_and_end_at_the_bounds_of_calibrate():
    torch.manual_seed(0)
    model, x = nn.Linear(5, 3), torch.randn(40, 5)
    y = torch.multinomial((model(x) / 2.5).softmax(-1), 1).squeeze(1)
    skipped = torch.where(torch.arange(40) % 4 == 0, -100, y)
    some, few = TemperatureScaling(model).fit(loader(x, skipped)), skipped != -100
    assert some.fit_report is not None and some.fit_report.points == 30
    assert some.temperature == pytest.approx(TemperatureScaling(model).fit(loader(x[few], y[few])).temperature)
    sure = model(x).argmax(-1)  # the colder, the better
    calibrated = Classifier(MAP(model)).calibrate(loader(x, sure), progress=False)
    cold = TemperatureScaling(model).fit(loader(x, sure))
    assert cold.temperature == pytest.approx(float(calibrated.temperature)) and cold.fit_report.at_bound
    with pytest.raises(InputError, match="all labels are -100"):
        TemperatureScaling(model).fit(loader(x, torch.full_like(y, -100)))


def test_temperature_errors():
    with pytest.raises(InputError, match="positive"):
        TemperatureScaling(nn.Linear(2, 2), temperature=0.0)
    with pytest.raises(InputError, match="empty"):
        TemperatureScaling(nn.Linear(2, 2)).fit([])
    with pytest.raises(InputError, match="0 to 1"):
        TemperatureScaling(nn.Linear(2, 2)).fit([(torch.zeros(1, 2), torch.tensor([2]))])
