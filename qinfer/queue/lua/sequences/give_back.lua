-- Offers the sequences of a draining worker to other workers; explicit sequences end.
-- KEYS: the worker's sequences. ARGV: prefix, is_fragile, worker, names. Returns {how many, unreferenced objects}.
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
