"""All models of the survey."""

from __future__ import annotations

from benchmarks.survey.image_models import IMAGE_CASES
from benchmarks.survey.libraries import library_cases
from benchmarks.survey.research_models import RESEARCH_CASES
from benchmarks.survey.sequence_models import SEQUENCE_CASES
from benchmarks.survey.survey_case import SurveyCase
from benchmarks.survey.zoo import ZOO


def cases() -> list[SurveyCase]:
    """The models of the zoo, of the libraries that are installed, and those written here."""
    return [*ZOO, *library_cases(), *SEQUENCE_CASES, *IMAGE_CASES, *RESEARCH_CASES]
