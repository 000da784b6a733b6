"""The author's own text of classes that one stage has whole, cut to the branches that ran."""
