# The word in capitals, by whatever command.
[ "$(cat new.txt)" = RED ] || exit 1
