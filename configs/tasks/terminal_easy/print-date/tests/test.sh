# The year of the machine's clock.
[ "$(cat year.txt)" = "$(date +%Y)" ] || exit 1
