# The word in capitals, by whatever command.
[ "$(cat out.txt)" = GOLD ] || exit 1
