"""What several folders of tests share: models, artifacts, cases, fakes, stores."""
