# The part of Apache Airflow 3 that qinfer uses. It is no dependency; its environment is made by scripts/tools.
