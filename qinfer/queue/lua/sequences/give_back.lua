-- Gives sequences of a worker that drains to whoever has free slots; those whose state is in its memory end.
-- KEYS: the sequences that the worker owns. ARGV: partition's prefix, whether Redis may lose, worker, names.
-- Returns {how many were given back, names of objects that nothing refers to now}.
begin(ARGV[1], ARGV[2])
make_room()
local given, gone = 0, {}
for i = 4, #ARGV do
  local of = load(ARGV[i])
  if of and of.state == 'open' and of.owner == ARGV[3] then
    for _, object in ipairs(hand_over(of, false)) do gone[#gone + 1] = object end
    given = given + 1
  end
end
return {given, gone}
