"""The build of an engine: `build.py` is the numbered driver, most other files are its steps.

report_text   the report of a build
frontend      model file -> what plans are made of (`frontend_result`)
int8_ranges   its ranges of INT8
plan_models   plans without a build
measure       INT8 ranges without a build
"""
